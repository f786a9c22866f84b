"""What a model needs: skeletons of modules, and modules without weights."""
