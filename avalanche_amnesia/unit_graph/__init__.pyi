from .findings import ModelError as ModelError
from .findings import Unsupported as Unsupported
from .values import Value as Value
from .walk import derives as derives
from .walk import rule as rule
