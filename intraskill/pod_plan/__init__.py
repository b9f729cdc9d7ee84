"""What a training step and a decode step would take on a pod, found out without one: `launch/plan.py`."""
