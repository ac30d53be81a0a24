"""`bench agent`: recorded sessions of agents, replayed turn by turn.

`session.py` reads them, `replay.py` answers them here or at a server, `command.py` reports.
"""
