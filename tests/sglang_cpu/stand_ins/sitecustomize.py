"""Lets a torchvision that was built for CUDA be imported under a CPU build of torch, by declaring its operators before it looks for them."""

import importlib.abc
import sys

_KEPT = []  # a library's declarations end with it


class _DeclareOperators(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            for pooling in ("roi_align", "ps_roi_align", "roi_pool", "ps_roi_pool", "deform_conv2d"):
                library.define(f"{pooling}(Tensor a) -> Tensor")
                library.define(f"_{pooling}_backward(Tensor a) -> Tensor")
            _KEPT.append(library)
        return None


sys.meta_path.insert(0, _DeclareOperators())
