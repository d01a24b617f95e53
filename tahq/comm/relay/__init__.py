"""Links between workers that cannot dial each other: both dial a relay, which joins their connections."""
