"""Every error that this package raises on purpose. Messages name the value, the rule and the remedy."""


class ShopEnvError(Exception):
    """Base of all errors below; launchers print it as one line."""


class InvalidProduct(ShopEnvError):
    """A product that breaks a rule of the catalogue. Importers count these by `reason` and go on."""

    def __init__(self, product_id: str, reason: str):
        super().__init__(f"product {product_id!r}: {reason}")
        self.product_id = product_id
        self.reason = reason


class InvalidTask(ShopEnvError):
    """A task that breaks a rule, or tasks that cannot be split as asked."""


class InvalidWorld(ShopEnvError):
    """A world directory that is missing, damaged or inconsistent."""


class InvalidSource(ShopEnvError):
    """A file of a public data set that cannot be read at all; single bad rows are reported instead."""


class InvalidSetting(ShopEnvError):
    """A setting of the shop, its service or its client that lies outside its range."""


class EpisodeEnded(ShopEnvError):
    """A call to an episode that is over."""


class PortBusy(ShopEnvError):
    """The service's port cannot be bound."""


class ShopUnavailable(ShopEnvError):
    """The service could not be reached, or kept failing, within the client's retries."""


class ShopRefused(ShopEnvError):
    """The service answered a request with a 4xx: `status`, and its typed `error`."""

    def __init__(self, status: int, error: str, message: str):
        super().__init__(f"{error} ({status}): {message}")
        self.status = status
        self.error = error
