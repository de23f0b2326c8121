"""What workers and coordinators read and update parameters with."""
