"""Work on a Ray cluster: points of a sweep as tasks, copies of a model as actors. Calls alone import Ray."""
