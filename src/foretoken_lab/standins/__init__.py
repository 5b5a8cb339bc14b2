"""Small models in the shapes of the paper's, trained on your text; a module for each kind."""
