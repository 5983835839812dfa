"""What a configuration means before it is trained: read measured_plan.py first."""
