from loop.fixtures import checkpoint, launcher

__all__ = ["checkpoint", "launcher"]
