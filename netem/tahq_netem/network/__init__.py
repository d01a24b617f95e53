"""What a network looks like: hosts and links, named profiles, faults on a timeline."""
