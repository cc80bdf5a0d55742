"""Token mixers: learned feature maps, the way window and linear part combine, and the carried state.

Nothing here knows of transformers, teachers or training.
"""

from linearize.mixers.bidirectional import BidirectionalMixer
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.linear import LinearMixer
from linearize.mixers.mixer import Mixer
from linearize.mixers.mixer_state import MixerState
from linearize.mixers.recording import Recording

__all__ = ["AttnInputs", "BidirectionalMixer", "LinearMixer", "Mixer", "MixerState", "Recording"]
