"""What is done to a job, as plain data; needs no torch."""
