from hypothesis import settings

# Two cores shared with others: how long an example takes says nothing about the code.
settings.register_profile("paceline", deadline=None)
settings.load_profile("paceline")
