"""`bench agent`: replays recorded sessions of agents, turn by turn."""
