"""Public data sets brought into the canonical world directory: streaming, and every row that is left out is reported with a reason."""
