"""The interactive viewer: Python folds a trace once, the page only applies differences."""
