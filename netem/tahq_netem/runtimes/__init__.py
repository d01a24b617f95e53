"""What a sweep can measure: tahq, what a user would take instead, and a control. `registry` has them by name."""
