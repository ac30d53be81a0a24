"""llama.cpp as people run it: a `llama-server` of this machine, plain and with n-gram lookups.

The lookups are in the server's own code and not in its libraries, so the program itself is started.
"""
