"""What a selection costs. Only a price that the catalogue states for exactly this selection counts as verified."""

from collections.abc import Mapping

from shop_env.catalog import Product


def _fixed_price(product: Product) -> float | None:
    """The price when no axis changes it: the one price that all options state, else the list price."""
    stated = {price for values in product.options.values() for price in values.values() if price is not None}
    return stated.pop() if len(stated) == 1 else product.price


def variant_price(product: Product, chosen: Mapping[str, str]) -> float | None:
    """Price of the selected variant, or None when it cannot be verified (price axis not chosen, or its value states none)."""
    axis = product.price_axis
    if axis is None:
        return _fixed_price(product)
    return product.options[axis].get(chosen.get(axis, ""))


def price_range(product: Product, chosen: Mapping[str, str]) -> tuple[float, float] | None:
    """Lowest and highest price that the selection can still come to; None when no price is stated."""
    axis = product.price_axis
    if axis is None or axis in chosen:
        price = variant_price(product, chosen)
        return None if price is None else (price, price)
    prices = [price for price in product.options[axis].values() if price is not None]
    return min(prices), max(prices)
