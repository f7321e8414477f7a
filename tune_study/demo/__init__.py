"""A recorded study, which shows what a study leaves without training anything."""
