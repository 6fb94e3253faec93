"""Stack traces of traced nodes with only the frames that torch.export keeps.

torch summarises the whole stack for every node, a hundred frames under pytest, and then keeps only those of
``forward`` functions and of ``torch/__init__.py``. This takes an eighth of the time of an export.
"""

import sys
import traceback

import torch
from torch.fx import proxy


class KeptFrames:
    """The part of torch.fx's CapturedTraceback that torch.fx uses."""

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
    """Make torch.fx use KeptFrames, if this version of torch keeps only those frames."""
    if hasattr(proxy.TracerBase, "_record_forward_stack_traces_only"):
        proxy.CapturedTraceback = KeptFrames
