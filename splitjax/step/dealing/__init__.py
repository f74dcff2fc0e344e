"""Rewrites products with fused weights so that devices have what is cut apart behind them."""
