"""A built-in English text for perplexity, written for this package."""

TEXT = """\
The lighthouse at the end of the bay had been dark for eleven years when Mara came back to repair it. She arrived on a \
Tuesday in March, with two suitcases, a box of tools and a letter from the harbour office that allowed her to live in the \
keeper's house until the work was done. The village had changed less than she had expected. The bakery still opened before \
sunrise, the church clock was still four minutes slow, and the same old men sat on the same bench and watched the boats.

The first problem was the staircase. Salt had eaten the iron, and one step in three would not bear her weight. She spent a \
week cutting planks and bolting them over the worst places before she could carry anything heavy to the top. The second \
problem was the lamp itself. Gulls had broken a window and built a nest inside the lens, and the gears that turned it were \
covered with rust. She cleaned every tooth with a wire brush and oil, and by the end of the month the mechanism moved again, \
slowly and with a noise like a large animal waking up.

People began to visit. A teacher brought her class, and the children asked how far the light could be seen. Mara explained \
that the earth is round, so the answer depends on how high the lamp stands and how high the ship's captain stands, and that on \
a clear night it might be twenty miles. A fisherman gave her a basket of mackerel and said that he had never trusted the new \
electronic signals, because a machine can fail without telling you, while a light that has gone out is plain to everyone.

In June she lit the lamp for the first time. Half of the village stood on the beach, and when the beam passed over the water \
nobody spoke. Then somebody started to clap, and the sound travelled along the shore until it was louder than the waves. Mara \
sat down on the top step, looked at her hands, which were black with oil, and laughed.
"""
