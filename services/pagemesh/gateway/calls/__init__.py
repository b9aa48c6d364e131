"""The life of a request: what was asked, what workers sent, what comes next. Pure."""
