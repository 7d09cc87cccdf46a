"""Which node each pod of an engine goes to, decided from facts alone: nodes, what runs there, what is placed already."""
