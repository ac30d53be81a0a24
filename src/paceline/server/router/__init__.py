"""Several models after one port: each in a process of its own, loaded when it is asked for."""
