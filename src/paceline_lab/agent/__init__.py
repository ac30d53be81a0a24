"""`bench agent`: recorded sessions of agents, replayed turn by turn."""
