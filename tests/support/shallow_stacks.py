"""Stack traces of traced nodes, taken of the frames alone that torch.export keeps.

torch makes a summary of the whole stack for every node, which is a hundred frames deep under pytest, and then keeps
those of ``forward`` functions and of ``torch/__init__.py``: an eighth of the time of an export.
"""

import sys
import traceback

import torch
from torch.fx import proxy


class KeptFrames:
    """What torch.fx calls a captured traceback, as far as it asks one for anything."""

    @staticmethod
    def extract() -> type["KeptFrames"]:
        return KeptFrames

    @staticmethod
    def summary() -> traceback.StackSummary:
        frame, kept = sys._getframe(1), traceback.StackSummary()
        while frame is not None:
            code = frame.f_code
            if code.co_name == "forward" or code.co_filename == torch.__file__:
                kept.append(traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name))
            frame = frame.f_back
        kept.reverse()
        return kept


def take_kept_frames() -> None:
    """Let torch.fx take stack traces so, where this torch keeps those frames alone."""
    if hasattr(proxy.TracerBase, "_record_forward_stack_traces_only"):
        proxy.CapturedTraceback = KeptFrames
