"""The examples need a package that only some have installed."""

collect_ignore_glob = ["verifiers_examples/*"]
