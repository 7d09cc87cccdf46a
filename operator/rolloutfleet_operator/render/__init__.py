"""Pure builders of every object that the operator makes: same input, same bytes."""
