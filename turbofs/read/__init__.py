"""Reading: what to fetch (pure), the extent cache under one memory budget, and the fetcher that runs the plan."""
