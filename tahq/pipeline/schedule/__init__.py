"""Pipeline schedules as data: generation and printing."""
