from .encoding import Apart as Apart
from .encoding import checked as checked
from .files import StateError as StateError
from .files import refuse_foreign as refuse_foreign
from .files import replace_file as replace_file
from .files import replacing as replacing
