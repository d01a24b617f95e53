"""Pipeline schedules as data: generation, validation and printing."""
