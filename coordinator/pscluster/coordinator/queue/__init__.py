"""What users call: it schedules functions, waits for them, makes their data, evaluates and trains."""
