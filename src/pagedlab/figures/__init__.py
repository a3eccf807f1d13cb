"""The figures: drawn from recorded traces and from the code's own names."""
