from trellis_keras_command import main

main()
