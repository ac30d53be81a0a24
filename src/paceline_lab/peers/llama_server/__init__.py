"""llama.cpp in its usual form: an installed `llama-server`, plain and with n-gram lookups.

The lookups are in the server's own code and not in its libraries, so the program itself is started.
"""
