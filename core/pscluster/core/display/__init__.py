"""What users see: text made safe to show, short tracebacks, and how IPython shows errors and tables."""
