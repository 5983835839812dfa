"""What a configuration means before it is trained: read plan.py first."""
