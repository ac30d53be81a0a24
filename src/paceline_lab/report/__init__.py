"""`bench report`: records as charts, and as one page of HTML."""
