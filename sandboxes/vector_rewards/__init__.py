"""Vector rewards: policies that cover several objectives with sets of answers."""
