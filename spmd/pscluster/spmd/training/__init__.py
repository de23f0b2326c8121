"""What training loops over global arrays need beside arrays: optimizers and metrics whose state lies with variables."""
