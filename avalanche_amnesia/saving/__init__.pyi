from .encoding import Apart as Apart
from .files import refuse_foreign as refuse_foreign
from .files import replace_file as replace_file
from .files import replacing as replacing
from .values import StateError as StateError
from .values import checked as checked
