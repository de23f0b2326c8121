"""What is seen of a job: events, rates, metrics, timelines, progress."""
