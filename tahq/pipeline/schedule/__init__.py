"""Pipeline schedules as data: generating, validating and printing them."""
