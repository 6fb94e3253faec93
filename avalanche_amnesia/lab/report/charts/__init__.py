"""Charts as geometry: places and words of everything that the templates draw as SVG; one file per kind.

Colours, dashes and shapes of marks belong to roles (``here``, ``retrained``, ``never``, ``chance``, ``order``,
``seed``), which mean the same in every chart.
"""
