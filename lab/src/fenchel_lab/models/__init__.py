"""The models that the chapters and the commands train, and how they are trained."""
