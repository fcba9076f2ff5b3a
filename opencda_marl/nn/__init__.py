"""Network blocks, context encoders, compiled updates, the acting replica."""

from opencda_marl.core.tables import Table

__all__ = ["ENCODERS"]

ENCODERS = Table(
    "encoder",
    "opencda_marl.encoders",
    {
        "lstm": "opencda_marl.nn.context:Lstm",
        "attention": "opencda_marl.nn.context:Attention",
        "deepsets": "opencda_marl.nn.context:DeepSets",
    },
    {
        "lstm": "LSTM over the rows, farthest first; frozen unless told otherwise (the documented layout)",
        "attention": "multi-head attention of the ego vehicle over the rows",
        "deepsets": "a shared network per row, then max and mean",
    },
)
