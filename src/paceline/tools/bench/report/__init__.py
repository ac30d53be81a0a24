"""`bench report`: recorded results as charts, and as one page."""
