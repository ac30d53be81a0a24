"""`plan`: costs of calls, and the speed-up that drafting can give."""
