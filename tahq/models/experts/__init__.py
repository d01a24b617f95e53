"""Mixtures of experts: the products of experts, and the loss that balances them."""
