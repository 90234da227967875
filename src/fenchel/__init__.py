from fenchel.regularizers import *
