"""What the kernels reach against what the machine allows, and what a differential costs a step."""
